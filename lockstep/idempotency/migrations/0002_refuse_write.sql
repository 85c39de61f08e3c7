-- Sealed versions of a proxy refuse every write, also by their owner and by superusers, whom REVOKE does not bind.
CREATE FUNCTION refuse_write() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is a sealed version: it is immutable', TG_TABLE_NAME USING ERRCODE = 'insufficient_privilege';
END
$$;
