"""`fusepatch tune`: measures on the user's own GPU which backend is fastest for their model, and remembers it."""
