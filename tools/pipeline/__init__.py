"""Pipeline schedules: orders, timetables, simulation."""
