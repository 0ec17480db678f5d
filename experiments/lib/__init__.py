"""Modules that the experiments share."""
