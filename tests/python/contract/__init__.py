"""What every strategy of trireme must do, each as one process does it."""
