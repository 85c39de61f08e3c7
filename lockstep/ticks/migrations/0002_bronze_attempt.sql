-- Ticks that bronze may hold rows of, from before the first write on: acknowledged or not, and also when the tick was
-- deleted since. Only a tick without a row here may be appended; any other replaces what is there.
CREATE TABLE bronze_attempt (
    project_id text        NOT NULL REFERENCES project,
    tick_id    text        NOT NULL,
    first_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (project_id, tick_id)
);
