"""How good a trained model is: on held-out text, at finding needles, and on the tasks of lm-evaluation-harness."""
