"""One file per on-disk dialect: recognise it, explain it, read it into the catalog."""
