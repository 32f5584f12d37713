"""Architectures without a family file: transformers' own modules with our seams at attention, routers and experts (`impl = "hf"`).

`probe` looks at a model folder and says what the model is, or why it cannot run; `decoder` runs it. Only `spec` is free of torch.
"""
