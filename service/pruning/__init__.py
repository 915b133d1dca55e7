"""Pruning: magnitude and Wanda, calibration, the perplexity report."""
