"""The program around the passes: made functional before them, given back as captured, checked against its loop."""
