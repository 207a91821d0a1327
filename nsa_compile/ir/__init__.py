"""What the passes work on: steps and scans in captured graphs, carries, attention nodes, and how to change them."""
