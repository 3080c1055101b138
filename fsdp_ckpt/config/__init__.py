"""How a job is sharded and started: options, their checks, and the files and variables that they come from."""
