"""Ground floor: errors, the intern table, small data shapes, and the one door to optional modules."""
