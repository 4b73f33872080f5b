"""Bits of two audits side by side: what a trace computed, and the first call where two of them part."""
