"""Files that are whole or absent, locks, and object storage."""
