"""Features of a round that are members of their own: absent where nobody asks for them."""
