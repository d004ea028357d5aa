"""Trains one trial on several ranks: launch, process groups, and a module for each way to divide the work."""
