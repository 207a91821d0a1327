"""Starting runs: in processes of this machine, as one of those that others start, and by job files."""
