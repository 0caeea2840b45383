"""The command line: one file a verb; `main.py` is the frame."""
