"""Studies of what decides memory and accuracy: the tables and pictures of docs/study.md (`make study`)."""
