"""Kinds of repair, one module each: what they find, and the files that they would write or move."""
