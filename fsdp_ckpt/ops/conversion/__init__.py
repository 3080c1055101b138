"""What ``convert`` and ``reshard`` do, in parts."""
