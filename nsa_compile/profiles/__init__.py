"""Looking at the compiler: its passes, and what they did to a model."""
