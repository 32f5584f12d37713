"""`slipstream doctor`: does the user's own configuration compute the same, however it is cut up? On a model shrunken to two layers.

shrink    the model: its own options, small sizes, two layers of different kinds
material  what the checks run on: rollouts of an embedded engine, packed in several ways
worker    one of the processes of a world of 1, 2 or 4: computes every case of that world
checks    compares, and says what is broken
"""
