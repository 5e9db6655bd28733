"""The federation: the loop that Lightning fits, the round, and its parts."""
