"""What push and pull are made of: addresses on the hub, files that belong to a checkpoint, uploads and downloads."""
