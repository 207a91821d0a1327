"""Text from a trained model: the step that trained it, token by token."""
