"""Where bytes live: reading local files safely, publishing folders atomically."""
