"""Ground floor: errors, data types, notes, options, text, and the one door to optional modules."""
