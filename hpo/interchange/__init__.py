"""Imports studies from other tools and exports studies to them."""
