"""Pure functions, tensors in and tensors out: schedules, steps, solvers, sampling, replay. No model is loaded here."""
