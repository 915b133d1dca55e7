"""Models whose linear layers keep their weights compressed."""
