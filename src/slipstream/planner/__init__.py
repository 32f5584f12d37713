"""What a run needs, computed from its run file and config.json before anything starts. Torch-free; nothing is measured or loaded."""
