"""From a plan to batches on the devices."""
