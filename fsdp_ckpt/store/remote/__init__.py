"""Where bytes live when it is not a local disk: the hub, and object stores, through fsspec."""
