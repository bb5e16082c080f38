"""`vramcast classify`: from what a person asks for to a page, or to a line of JSON for each job."""
