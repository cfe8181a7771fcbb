"""The optimize stage: stored trajectories and advantages in, the next policy version out."""
