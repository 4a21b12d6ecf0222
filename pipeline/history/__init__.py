"""What a run was trained on: its log, its audit, the losses of its documents."""
