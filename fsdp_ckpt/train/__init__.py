"""What runs inside a training job: saving and loading its state. The one place that imports torch."""
