"""What runs are compared with: data-parallel training and synchronous DiLoCo, in lock-step in one process."""
