"""The processes that train together: who they are, how they share a model and send gradients."""
