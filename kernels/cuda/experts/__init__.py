"""Mixture of experts on the GPU: choice, places, products of groups of rows, lanes."""
