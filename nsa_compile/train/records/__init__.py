"""What a run leaves in its directory as it goes, and the directory itself."""
