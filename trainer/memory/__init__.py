"""What a step needs of the device's memory, and what bounds it."""
