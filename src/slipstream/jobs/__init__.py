"""Commands that need one process: make a model, warm it up, evaluate it, talk to it."""
