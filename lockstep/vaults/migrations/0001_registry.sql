-- The vaults that the platform reads from. Credentials are never stored: they come from the environment.
CREATE TABLE registry (
    id       text        PRIMARY KEY CHECK (id ~ '^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$'),
    url      text        NOT NULL CHECK (url ~ '^https?://'),
    added_by text        NOT NULL,
    added_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
