"""Figures: arrays in, pictures out."""
