"""One verb per file: options in, a frozen report out. Nothing here prints or exits."""
