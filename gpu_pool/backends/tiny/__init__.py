"""`tiny`: the small torch language model that ships with Tierlane."""
