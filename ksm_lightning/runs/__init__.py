"""What a run leaves on disk: its folder, its checkpoints, and a finished run read back."""
