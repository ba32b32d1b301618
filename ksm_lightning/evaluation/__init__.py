"""Measures of a representation: kernel error, linear probe, clustering, and the arrays that figures show."""
