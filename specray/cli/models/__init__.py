"""Models of the commands: the group `specray models`, and what any command is given as a model."""
