"""`tc3 experts`: how unevenly experts load their devices, what moving them brings, and moved experts put back."""
