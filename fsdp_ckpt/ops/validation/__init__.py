"""What `validate` looks at, one module each."""
