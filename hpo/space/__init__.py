"""What a study searches and optimizes: dimensions, typed configurations, objectives and the states of a trial."""
