"""What customers read and change of their own account: usage, jobs and keys."""
